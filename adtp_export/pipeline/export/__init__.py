"""`export`: from a checkpoint to a published output directory."""
