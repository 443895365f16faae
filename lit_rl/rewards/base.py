"""What every reward is: texts in, one number per response out."""
