"""The usage journal: what each request used, durable on the local disk before anyone is told of its end."""
