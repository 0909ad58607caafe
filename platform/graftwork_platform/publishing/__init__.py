"""From uploaded files to a version that can be served."""
