"""Load: prompts of realistic make-up, arriving whether or not the server keeps up."""
