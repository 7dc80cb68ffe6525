"""Write a long document that can be interrupted and resumed at any point."""
