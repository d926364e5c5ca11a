"""Every experiment scaled down to two cores and 40 minutes, and one page of what it found."""
