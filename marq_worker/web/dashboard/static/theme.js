"use strict";
// Before anything is painted: no flash of the other theme.
const theme = localStorage.getItem("marq-theme");
if (theme) document.documentElement.dataset.theme = theme;
