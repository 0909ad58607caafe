"""Every operator in plain torch, the specification that other implementations are held to. Leaves checking arguments to `ops`."""
