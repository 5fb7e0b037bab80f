"""Work of the stages, by kind of work and part of the model."""
