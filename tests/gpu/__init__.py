"""Everything that is owed to a GPU, in order of worth: `make gpu`, then `make gpu-report`."""
