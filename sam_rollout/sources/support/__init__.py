"""Building blocks of sources; no module here is a source."""
