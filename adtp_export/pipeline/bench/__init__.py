"""`bench`: times against dense BERT, and of the targets of an output directory."""
