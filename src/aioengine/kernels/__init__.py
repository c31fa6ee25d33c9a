"""The innermost loops, and a plain torch oracle for each."""
