"""Our own scripts that run inside the sandbox, as plain files: nothing here is imported."""
