"""What every command of the project shares: how it ends, and how it reads its arguments.

Neither module imports PyTorch, so that the help and a misspelt option are answered at once.
"""
