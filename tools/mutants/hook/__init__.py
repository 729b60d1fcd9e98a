"""What every Python process imports at its start while `reach` watches."""
