"""What executes a model: one package a backend, imported only when it is chosen."""
