"""The output directory: what its files say, how it is replaced in one step, and the Hub."""
