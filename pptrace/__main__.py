"""``python -m pptrace``: the same as ``pptrace``, where its program is not on the PATH."""

from pptrace.cli.main import main

if __name__ == "__main__":
    main()
