"""What mtrain is compared with: loops as a good programmer writes them, on each stack and on the libraries beside mtrain."""
