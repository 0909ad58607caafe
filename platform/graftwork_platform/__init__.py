"""People, money and HTTP. Knows tenants, keys, names and usage; refuses to know tensors."""
