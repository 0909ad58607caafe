"""An adapter from uploaded bytes to kernel-ready rows. Refuses to know tenants, prompts and HTTP."""
