"""The planted bugs: one module for each room of the tree, in it the rows by file."""
