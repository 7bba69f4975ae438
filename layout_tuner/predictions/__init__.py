"""What is predicted of layouts: closed forms, their correction by measurements, statistics."""
