"""The documents, and what makes a site and pictures of them."""
