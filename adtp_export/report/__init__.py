"""Records to text: nothing here measures or decides."""
