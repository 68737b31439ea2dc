"""What another policy would have earned on recorded rounds."""
