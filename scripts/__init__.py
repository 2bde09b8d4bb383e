"""What is run by hand on machines that the tests don't have."""
