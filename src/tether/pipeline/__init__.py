"""`tether pipeline`: supervised fine-tuning, ratings, reward models and RL, for as many rounds as asked."""
