"""Python API: the calls of ``import pptrace`` for scripts and notebooks, of which the command line is made as well."""
