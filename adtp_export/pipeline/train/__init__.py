"""`train`: from a teacher and rows to students."""
