"""What experts on several ranks cost a run: their exchanges, the rank that comes last, and what unequal routes take of a step."""
