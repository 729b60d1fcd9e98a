"""Files that others made: whether one is what its name says, and how long a download may stand."""
