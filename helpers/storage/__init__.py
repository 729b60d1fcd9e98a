"""What is kept on disk: a state that is whole or said to be damaged, a folder that one run uses."""
