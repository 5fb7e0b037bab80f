"""What a model needs on a mesh, as columns and as tables."""
