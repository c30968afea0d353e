"""What an answer is made of: which tokens it rests on, and what dropped tokens had passed on before their cut."""
