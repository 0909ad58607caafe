"""The admin API: tenants, keys, adapters, uploads and usage over HTTP."""
