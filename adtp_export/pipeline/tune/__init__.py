"""`tune`: from a fine-tuned model to the fastest student of it that is good enough."""
