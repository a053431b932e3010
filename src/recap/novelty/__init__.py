"""Notices: admission rules, which score what a block shows and say what a bank keeps of it."""
