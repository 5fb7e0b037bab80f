"""Records of ``pptrace run --live``, in one file per rank: written by the ranks of a run, read while it goes on."""
