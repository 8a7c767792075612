"""What eval_epic.py calls: judges of states, datasets of states, figures, the labelling page."""
