"""Ring files and recordings: storage of the records that an observed process writes."""
