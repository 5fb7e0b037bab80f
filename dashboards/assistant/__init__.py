"""The run as tools of an assistant, through the Model Context Protocol: ``pptrace mcp``."""
