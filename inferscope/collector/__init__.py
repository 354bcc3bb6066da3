"""The reader's half: rings and recordings in, final numbers and snapshots out."""
