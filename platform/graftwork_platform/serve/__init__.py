"""`graftwork serve`: one machine's processes, started, watched and stopped. Refuses to know requests."""
