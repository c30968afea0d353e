"""What a model answers with, one head per file: transformers' model classes for each task, with tokens dropped inside."""
