"""What ``import pptrace`` offers to scripts and notebooks; the command line is made of the same calls."""
