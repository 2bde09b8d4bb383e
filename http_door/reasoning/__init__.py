"""What a model writes to itself before it answers, told apart from the answer."""
