"""What the stages compute, by kind of work and part of the model."""
