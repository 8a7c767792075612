"""What eval_epic.py calls: runs, datasets of states, rewards of models, figures, pages."""
