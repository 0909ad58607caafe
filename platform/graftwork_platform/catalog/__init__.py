"""From a model's name to the digest of an immutable adapter version, inside one tenant."""
