"""The web UI's build output, served by the platform. Holds no logic."""
