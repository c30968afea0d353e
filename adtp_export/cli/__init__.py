"""The commands, one per file. They import everything and nothing imports them."""
