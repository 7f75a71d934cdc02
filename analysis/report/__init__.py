"""How is it shown?  Figures, pages and TensorBoard; nothing below it draws."""
