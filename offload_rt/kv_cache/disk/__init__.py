"""Files on a disk as a slow memory: many requests at once, past the page cache."""
